"""How the Kubernetes API is reached and by whom: shared by operator and command line. No requests are made here."""
