"""The version, in a module that setup.cfg can read without importing the package."""

__version__ = "0.1.0"
