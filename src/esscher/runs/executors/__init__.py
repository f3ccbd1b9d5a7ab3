"""Who does the units of a run: this process (serial), local processes, a Dask cluster; base has the
interface of all.
"""
