"""Decoding with a transformers model: rows that join and leave one running batch, shared by every engine that runs one."""
