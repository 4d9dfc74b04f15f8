"""Several processes of one run under torchrun: DDP and FSDP2."""
