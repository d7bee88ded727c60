"""Inside the Ray job: verl's configuration from recipe and arm, the verl plugin, the observed trainer and engine."""
