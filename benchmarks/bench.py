"""``python -m dsv4_ops bench topk`` beside every peer, as table and picture: ``bench-topk.json`` and ``bench-topk.png``.

More arguments go to the command: ``python -m benchmarks.bench --rows 8``.
"""

from __future__ import annotations

import sys

from dsv4_ops.__main__ import main

from . import results

if __name__ == "__main__":
    files = results.folder() / "bench-topk.json", results.folder() / "bench-topk.png"
    sys.exit(main(["bench", "topk", "--against", "vllm,flashinfer,torch", "--json", str(files[0]), "--plot", str(files[1]), *sys.argv[1:]]))
