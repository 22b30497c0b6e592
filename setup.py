"""The packages. All else stands in pyproject.toml, which cannot say that configs/ is saejax.experiments."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["saejax", "saejax.*"]), "saejax.experiments"],
    package_dir={"saejax.experiments": "configs"},
)
