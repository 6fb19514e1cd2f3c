"""Wheels that jobs require: a fetcher resolves and downloads them, a sealed process unpacks them.

The fetcher reaches the index and knows its credentials, but builds nothing and runs nothing of a
package: it reads names and `METADATA`. The process that unpacks reaches neither network nor store,
and can write to one folder only. `sources.py` says where wheels come from.
"""
