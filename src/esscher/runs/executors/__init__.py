"""Who does the units of a run: this process, local processes, a Dask cluster."""
