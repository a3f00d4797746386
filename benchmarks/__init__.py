"""Benchmarks and studies; run them from the checkout: `python -m benchmarks.speed.bench_epoch --tiny`."""
