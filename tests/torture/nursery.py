"""A process that has imported Kestrel and loaded its compiled kernels, and forks a server whenever it is told to.

A server started this way runs the same `kestrel serve` in a process of its own, but is up in a fraction of the time
a new interpreter takes. Run as `python -m tests.torture.nursery WORDS…`; one JSON object a line comes in on stdin
(words, folder, log, spell), lines `born NUMBER PID` and `dead NUMBER STATUS` go out on stdout.
"""

import ctypes
import faulthandler
import gc
import json
import os
import signal
import struct
import sys
from typing import Any, get_args

import onnx  # noqa: F401  (what follows imports when it is first needed)

import kestrel.server.app  # noqa: F401
from kestrel.cli import main
from kestrel.config import load_config
from kestrel.engine.kernels import load_kernels
from kestrel.runtime import Runtime
from kestrel.store.layout import KvDtype


def warm_up(words: list[str]) -> None:
    """Load the kernels that a server needs, without ever running one: threads would not survive a fork.

    The model is opened, and so converted, by a child.
    """
    child = os.fork()
    if not child:
        try:
            with Runtime.open(load_config([*words, "cache=off"]), lambda line: None):
                pass
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    for kv_dtype in get_args(KvDtype):
        load_kernels(kv_dtype)
    load_config(words)


def bear(number: int, order: dict[str, Any]) -> None:
    """Fork a keeper that forks the server and tells how it ended.

    The keeper stands in between to wait for its own server alone, while the parent goes on taking orders.
    """
    if os.fork():
        return
    end_with_parent()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    server = os.fork()
    if server:
        tell(f"born {number} {server}")
        _, status = os.waitpid(server, 0)
        tell(f"dead {number} {os.waitstatus_to_exitcode(status)}")
        os._exit(0)
    end_with_parent()
    code = 1
    try:
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        nothing = os.open(os.devnull, os.O_RDONLY)
        for target, fd in ((0, nothing), (1, log), (2, log)):
            os.dup2(fd, target)
        faulthandler.register(signal.SIGUSR1, file=2)  # what it is doing, for the log of one that hangs
        os.chdir(order["folder"])
        if os.geteuid() == 0:
            become_ordinary()
        exec(order["spell"], {})  # Python that spoils this process's disk or clock
        code = main(["serve", *order["words"]])
    finally:
        os._exit(code)


def end_with_parent() -> None:
    """Have the kernel kill this process when the one that forked it ends: no server outlives a cut-off test run."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def become_ordinary() -> None:
    """Let go of root's power to ignore permissions: faults shall be met as an ordinary user meets them."""
    header = struct.pack("=Ii", 0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    if ctypes.CDLL(None, use_errno=True).capset(header, bytes(24)):
        raise OSError(ctypes.get_errno(), "capset")


def tell(line: str) -> None:
    """One whole line on stdout, whoever else writes there."""
    os.write(1, f"{line}\n".encode())


def work(words: list[str]) -> None:
    """Serve orders until stdin ends."""
    warm_up(words)
    gc.collect()
    gc.freeze()  # children share these pages for longer
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers need nobody to wait for them
    tell("ready")
    for number, line in enumerate(sys.stdin):
        bear(number, json.loads(line))


if __name__ == "__main__":
    work(sys.argv[1:])
