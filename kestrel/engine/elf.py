"""Shared libraries made here, without a linker: an object file of LLVM's, or a few bytes of machine code, to be opened.

No linker can be presumed on a board, and what is needed of one is little: sections are put one after the other, the
distances between them are written into the code, and what the code calls elsewhere goes by a table that the system's
loader fills in. x86-64 and aarch64.
"""

import ctypes
import os
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from kestrel.errors import KestrelError

# A library in memory: headers, code from _CODE on, tables; from _DATA on what the loader writes to.
_PAGE = 1 << 16  # the largest there is
_CODE = 1 << 12  # as code for aarch64 is placed relative to 4 KiB
_DATA = 1 << 24
_IMPORTS = _DATA + 256  # addresses of imported functions, behind the dynamic section

_SECTION = np.dtype(
    [("name", "<u4"), ("type", "<u4"), ("flags", "<u8"), ("address", "<u8"), ("offset", "<u8")]
    + [("size", "<u8"), ("link", "<u4"), ("info", "<u4"), ("align", "<u8"), ("entry", "<u8")]
)
_SYMBOL = np.dtype(
    [("name", "<u4"), ("info", "u1"), ("other", "u1"), ("section", "<u2"), ("value", "<u8"), ("size", "<u8")]
)
_RELOCATION = np.dtype([("offset", "<u8"), ("type", "<u4"), ("symbol", "<u4"), ("addend", "<i8")])
_SYMBOLS, _RELOCATIONS = 2, 4  # types of section
_WRITTEN, _LOADED = 1, 2  # flags of a section
_FUNCTION = 0x12  # global, a function

_IS_X86 = platform.machine() == "x86_64"
_MACHINE = 62 if _IS_X86 else 183
_FILL_IN = 6 if _IS_X86 else 1025  # asks for an address: R_X86_64_GLOB_DAT, R_AARCH64_GLOB_DAT
_PC32, _PLT32 = 2, 4  # of x86-64: a distance
# Of aarch64: a distance in 4 KiB; the place within them, in units of bytes as powers of 2; a distance of a jump.
_PAGE_DISTANCE = 275
_WITHIN_PAGE = {277: 0, 278: 0, 284: 1, 285: 2, 286: 3, 299: 4}
_JUMPS = (282, 283)


class CannotLink(KestrelError):
    """An object file needs more than is done here."""

    def __init__(self, what: str):
        super().__init__(
            f"the attention kernels cannot be linked: {what}; another version of numba may do, 0.68 is known to"
        )


@dataclass(frozen=True)
class Code:
    """Machine code that runs at any address: functions by their offsets, and the functions it needs of others."""

    content: bytes
    functions: Mapping[str, int]
    imports: Sequence[str] = ()


def jump_to(address: int) -> bytes:
    """A function that jumps to an address of this process."""
    if _IS_X86:
        return b"\x48\xb8" + struct.pack("<Q", address) + b"\xff\xe0"  # movabs rax; jmp rax
    return struct.pack("<IIQ", 0x58000050, 0xD61F0200, address)  # ldr x16, 8; br x16


def link(file: bytes) -> Code:
    """The code of a relocatable 64-bit ELF file, compiled to be independent of its place. CannotLink."""
    (headers,) = struct.unpack_from("<Q", file, 40)
    count, names = struct.unpack_from("<HH", file, 60)
    sections = np.frombuffer(file, _SECTION, count, headers)

    def content(section: Any) -> bytes:
        return file[int(section["offset"]) : int(section["offset"] + section["size"])]

    def text(table: bytes, at: int) -> str:
        return table[at : table.index(b"\0", at)].decode()

    linked = bytearray()
    places: dict[int, int] = {}
    for number, section in enumerate(sections):
        name = text(content(sections[names]), section["name"])
        if not section["flags"] & _LOADED or not section["size"] or name == ".eh_frame":  # nothing unwinds it
            continue
        if section["flags"] & _WRITTEN:
            raise CannotLink(f"section {name} is written to")
        linked += b"\0" * (-len(linked) % int(section["align"]))
        places[number] = len(linked)
        linked += content(section)

    table = next(section for section in sections if section["type"] == _SYMBOLS)
    symbols = np.frombuffer(content(table), _SYMBOL)
    strings = content(sections[table["link"]])
    functions, imports = {}, {}
    for number, symbol in enumerate(symbols):
        if symbol["name"] and not symbol["section"]:
            linked += b"\0" * (-len(linked) % 16)
            imports[number] = text(strings, symbol["name"]), len(linked)
            linked += _jump_through(_CODE + len(linked), _IMPORTS + 8 * (len(imports) - 1))
        elif symbol["info"] == _FUNCTION:
            functions[text(strings, symbol["name"])] = places[symbol["section"]] + int(symbol["value"])

    for section in sections:
        if section["type"] != _RELOCATIONS or section["info"] not in places:
            continue
        for one in np.frombuffer(content(section), _RELOCATION):
            symbol = symbols[one["symbol"]]
            if int(one["symbol"]) in imports:
                target = imports[int(one["symbol"])][1]
            else:
                target = places[int(symbol["section"])] + int(symbol["value"])
            at = places[int(section["info"])] + int(one["offset"])
            _relocate(linked, int(one["type"]), at, target + int(one["addend"]))
    return Code(bytes(linked), functions, [name for name, _ in imports.values()])


def _relocate(code: bytearray, kind: int, at: int, target: int) -> None:
    """Let the instruction at an offset refer to another. Both begin at a multiple of 4 KiB in memory."""
    (word,) = struct.unpack_from("<I", code, at)
    if _IS_X86 and kind in (_PC32, _PLT32):
        word = target - at & 0xFFFFFFFF
    elif not _IS_X86 and kind == _PAGE_DISTANCE:
        word |= _page_distance(at, target)
    elif not _IS_X86 and kind in _WITHIN_PAGE:
        word |= (target & 0xFFF) >> _WITHIN_PAGE[kind] << 10
    elif not _IS_X86 and kind in _JUMPS:
        word |= target - at >> 2 & 0x3FFFFFF
    else:
        raise CannotLink(f"relocation {kind} is not known")
    struct.pack_into("<I", code, at, word)


def _page_distance(at: int, target: int) -> int:
    """The operand of aarch64's adrp."""
    pages = (target >> 12) - (at >> 12)
    return (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5


def _jump_through(at: int, slot: int) -> bytes:
    """A function at one place that jumps to the address which another holds."""
    if _IS_X86:
        return b"\xff\x25" + struct.pack("<i", slot - at - 6)  # jmp [rip + …]
    adrp, load = 0x90000010 | _page_distance(at, slot), 0xF9400211 | (slot & 0xFFF) >> 3 << 10
    return struct.pack("<III", adrp, load, 0xD61F0220)  # adrp x16; ldr x17, [x16, …]; br x17


def shared_library(code: Code) -> bytes:
    """An ELF library with the functions of some code."""
    names = [*code.functions, *code.imports]
    strings = b"\0" + b"".join(name.encode() + b"\0" for name in names)
    symbols: npt.NDArray[Any] = np.zeros(1 + len(names), _SYMBOL)  # the first one is always empty
    at_name = 1
    for symbol, name in zip(symbols[1:], names, strict=True):
        symbol["name"], symbol["info"] = at_name, _FUNCTION
        at_name += len(name.encode()) + 1
        if name in code.functions:
            symbol["section"], symbol["value"] = 1, _CODE + code.functions[name]
    relocations: npt.NDArray[Any] = np.zeros(len(code.imports), _RELOCATION)
    relocations["offset"] = _IMPORTS + 8 * np.arange(len(code.imports))
    relocations["type"] = _FILL_IN
    relocations["symbol"] = 1 + len(code.functions) + np.arange(len(code.imports))

    at, body = {}, b""
    for part, content in (
        ("code", code.content),
        ("strings", strings),
        ("symbols", symbols.tobytes()),
        ("hash", struct.pack("<3I", 1, 1 + len(names), 1) + _chain(len(names))),
        ("relocations", relocations.tobytes()),
    ):
        body += b"\0" * (-len(body) % 8)
        at[part] = _CODE + len(body)
        body += content
    size = _CODE + len(body)
    if size > _DATA:
        raise CannotLink(f"{size} bytes are too many")
    dynamic = b"".join(
        struct.pack("<QQ", tag, value)
        for tag, value in (
            (4, at["hash"]), (5, at["strings"]), (6, at["symbols"]), (10, len(strings)), (11, _SYMBOL.itemsize),
            (7, at["relocations"]), (8, relocations.nbytes), (9, _RELOCATION.itemsize), (0, 0),
        )
    )  # fmt: skip
    data = dynamic.ljust(_IMPORTS - _DATA, b"\0") + b"\0" * (8 * len(code.imports))
    place = -(-size // _PAGE) * _PAGE  # of the data in the file
    headers = b"".join(
        struct.pack("<IIQQQQQQ", kind, flags, offset, address, address, length, length, align)
        for kind, flags, offset, address, length, align in (
            (1, 5, 0, 0, size, _PAGE),  # loaded, read and executed
            (1, 6, place, _DATA, len(data), _PAGE),  # loaded, read and written
            (2, 6, place, _DATA, len(dynamic), 8),  # the dynamic section
            (0x6474E551, 6, 0, 0, 0, 16),  # no executable stack
        )
    )
    start = b"\x7fELF\x02\x01\x01" + b"\0" * 9
    start += struct.pack("<HHIQQQIHHHHHH", 3, _MACHINE, 1, 0, 64, 0, 0, 64, 56, 4, 0, 0, 0)
    return ((start + headers).ljust(_CODE, b"\0") + body).ljust(place, b"\0") + data


def _chain(count: int) -> bytes:
    """A hash table's chain from symbol 1 to the last."""
    return struct.pack(f"<{count + 1}I", 0, *range(2, count + 1), 0)


def in_memory(library: bytes) -> str:
    """The path of a library as a file in memory, which stays as long as the process."""
    descriptor = os.memfd_create("kestrel", 0)
    os.write(descriptor, library)
    return f"/proc/self/fd/{descriptor}"


def address_of(function: Any) -> int:
    """The address of a C function known to ctypes."""
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address is not None
    return address
