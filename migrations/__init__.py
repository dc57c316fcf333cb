"""Alembic environment and revisions of plancache's database; ships as plancache.migrations."""
