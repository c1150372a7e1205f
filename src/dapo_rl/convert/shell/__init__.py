"""Reads shell scripts without running them."""
