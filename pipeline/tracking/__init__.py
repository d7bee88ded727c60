"""W&B, the mirror of run folders: live while a run trains, filled in afterwards, dashboards."""
