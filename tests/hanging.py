"""A child process that says that it is there, and then hangs in C and holds the GIL."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import NoReturn

from plancache.children import end_with_parent, send


def hang() -> NoReturn:
    while True:
        ctypes.PyDLL(None).pause()


if __name__ == "__main__":
    end_with_parent(int(sys.argv[3]))
    send(os.fdopen(int(sys.argv[2]), "wb", 0, closefd=False), b"here")
    hang()
