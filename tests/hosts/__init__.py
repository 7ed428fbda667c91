"""Backends that reach other hosts: `make test-hosts`."""
