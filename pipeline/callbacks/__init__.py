"""What is observed while a run trains (memory, policy drift, liveness, ledger) and where it goes (run folder, W&B)."""
