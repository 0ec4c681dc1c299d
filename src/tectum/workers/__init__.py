"""Encoders in processes of their own: what they are told (`messages`), how they work (`worker`), who starts and replaces
them (`process`, `pool`), and which of them gets a request (`router`)."""
