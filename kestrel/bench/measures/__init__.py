"""Measures of speed: one module each, `run(config, out, full) -> Result`. Heavy parts are imported when run."""
