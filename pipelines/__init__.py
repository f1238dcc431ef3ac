"""The stages of dvc.yaml: one short Hydra app each, `python -m pipelines.<stage> [key=value …]`."""
