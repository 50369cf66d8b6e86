"""Packages of the wheel: ``tracekit`` alone; the folder ``workloads/`` beside it is installed as ``tracekit.workloads``."""

from setuptools import find_namespace_packages, setup

setup(
    packages=find_namespace_packages(include=["tracekit*"])
    + [f"tracekit.{name}" for name in find_namespace_packages(include=["workloads*"])],
    package_dir={"tracekit.workloads": "workloads"},
)
