"""A batch file in, results out: formats, durable store, the job."""
