"""Fills the folder that PEERS_DIR names: ``python3 -m benchmarks.peers DIR``. README.md says what it takes and what it gives."""
