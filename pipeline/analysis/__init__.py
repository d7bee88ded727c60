"""Files in, verdicts out: load, ledger, treatment, memory, cost, diagnosis, parity, figures, report.

Pure: no GPU, no network, no clock. Imports no torch, ray, wandb or verl.
"""
