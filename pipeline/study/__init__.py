"""What a run is: records, run folder, names, pairing. Imports no torch, ray, wandb or verl."""
