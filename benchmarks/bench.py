"""``python -m dsv4_ops bench topk`` beside every peer, as table and picture: ``bench-topk.json`` and ``bench-topk.png``.

More arguments go to the command: ``python -m benchmarks.bench --rows 8``. A run that is stopped is written as ``bench-topk-part.json``.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from dsv4_ops.__main__ import main

from . import results

INTERRUPTED = 130


def stop(*_: Any) -> None:
    raise KeyboardInterrupt  # at which the command shows and writes what it has


if __name__ == "__main__":
    files = results.folder() / "bench-topk.json", results.folder() / "bench-topk.png"
    signal.signal(signal.SIGTERM, stop)
    code = main(["bench", "topk", "--against", "vllm,flashinfer,torch", "--json", str(files[0]), "--plot", str(files[1]), *sys.argv[1:]])
    if code == INTERRUPTED:
        for file in files:
            if file.exists():
                file.replace(file.with_stem(f"{file.stem}-part"))
    sys.exit(code)
