"""Profiles made from measurements that others published, and from logs of nccl-tests."""
