"""Calls functions in a second process, where Triton interprets kernels on CPU tensors instead of compiling them.

``TRITON_INTERPRET`` counts when Triton is imported and then for the whole process, so it is set in that process alone:
the tests around see Triton, if at all, as users do. An access out of bounds may end the process; then that one call
fails and the next starts another. Functions go by name: they and their arguments must be picklable.

``Interpreter(interpret=False)`` is a process that compiles: for targets that need not be there.
"""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest


def _serve(connection: Connection, interpret: bool) -> None:
    os.environ["TRITON_INTERPRET"] = str(int(interpret))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            function, args = connection.recv()
            answer = (True, function(*args))
        except EOFError:
            return
        except BaseException:  # of any kind: it belongs to the caller
            answer = (False, traceback.format_exc())
        connection.send(answer)


class Interpreter:
    """``interpreter(function, *args)`` is ``function(*args)`` in the other process; its exceptions fail the test."""

    def __init__(self, seconds: float = 300, interpret: bool = True) -> None:
        self.seconds, self.interpret = seconds, interpret
        self._process: Any = None

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        if self._process is None or not self._process.is_alive():
            context = multiprocessing.get_context("spawn")
            self._connection, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, self.interpret), daemon=True)
            self._process.start()
            other.close()
        try:
            self._connection.send((function, args))
            if not self._connection.poll(self.seconds):
                self.close()
                pytest.fail(f"no answer from Triton's process after {self.seconds} s", pytrace=False)
            fine, answer = self._connection.recv()
        except (EOFError, ConnectionError):
            self._process.join()
            pytest.fail(f"Triton's process ended with code {self._process.exitcode}: an access out of bounds?", pytrace=False)
        if not fine:
            pytest.fail(answer, pytrace=False)
        return answer

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None
