"""One folder a framework: ``__init__.py`` holds the BackendSpec (light), ``engine.py`` and ``trainer.py`` the code."""
