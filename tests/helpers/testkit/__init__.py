"""What tests of several folders share. Imported as `testkit`; the repository root is never on sys.path."""
