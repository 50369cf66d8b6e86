"""The analytical model: memory, communication, pipeline and time in closed form, before a job runs."""
