"""Parts for tests of Paceline and of plug-ins."""
