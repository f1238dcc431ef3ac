"""Which instructions kernels are compiled for: a level that many processors share, rather than this very one."""

import functools
import platform


@functools.cache
def instruction_level() -> str:
    """LLVM's name of the highest level this processor has: x86-64-v4 (AVX512), -v3 (AVX2), -v2 or generic.

    Asked of the processor by numpy, which is in memory anyway; /proc/cpuinfo is the host's under an emulator.
    """
    if platform.machine() != "x86_64":
        return "generic"
    from numpy._core._multiarray_umath import __cpu_features__ as has

    if has.get("AVX512_SKX"):  # F, CD, BW, DQ and VL
        return "x86-64-v4"
    return "x86-64-v3" if has["AVX2"] and has["FMA3"] else "x86-64-v2"
