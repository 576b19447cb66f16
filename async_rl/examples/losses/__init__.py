"""Published losses for old data as plug-ins: each file is one method, ready to be copied.

The league in docs/staleness.md recommends none of them at any age of the data, so they are no
settings of the product. `algorithm=sapo` and the other files of conf/algorithm/ select them.
"""
