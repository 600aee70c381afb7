"""Which products native FP8, MX and NVFP4 refuse or pad, by device."""
