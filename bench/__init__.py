"""The benchmark: the server against the bare loop, on this machine, in one run (`python -m bench`).

`sections` measures, `server` starts what is measured and reads its CPU seconds and memory, `bare` is the loop without a
service, `report` judges against the targets, prints, and writes the table of docs/performance.md.
"""
