"""The CPU stand-ins: device redirection, reference FusedAdam, local layers, rollout server, tiny model and data."""
