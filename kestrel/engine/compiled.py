"""numba's compilers, with the compiled code kept between processes."""

import hashlib
import os
from pathlib import Path
from typing import Any

import numba


def compiled(compiler: Any = numba.njit, *signature: Any) -> Any:
    """A decorator that compiles a function with `numba.njit`, or `numba.cfunc` and a signature.

    The code is kept in the user's cache, in a folder named after all sources of compiled functions: numba's own cache
    looks at the file of the function alone and would keep code of an older file that it calls.
    """
    here = Path(__file__).parent
    names = ("attention.py", "compiled.py", "records.py", "vector.py", "worker_pool.py")
    sources = b"".join((here / name).read_bytes() for name in names)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = home / "kestrel" / f"kernels-{hashlib.sha256(sources).hexdigest()[:12]}"
    options = {"nogil": True, "error_model": "numpy"} if compiler is numba.njit else {}

    def decorate(function: Any) -> Any:
        settings: Any = numba.config
        before = settings.CACHE_DIR
        try:
            folder.mkdir(parents=True, exist_ok=True)
            settings.CACHE_DIR = str(folder)
            return compiler(*signature, cache=True, **options)(function)
        except OSError:  # no writable home: compile at every start
            return compiler(*signature, **options)(function)
        finally:
            settings.CACHE_DIR = before

    return decorate
