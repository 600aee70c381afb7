"""Decide: find shapes that native FP8, MX and NVFP4 refuse or pad."""
