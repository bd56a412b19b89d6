"""accelerate's YAML for FSDP and DDP."""
