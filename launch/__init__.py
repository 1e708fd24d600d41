"""Many runs: from a sweep to finished run folders. Never imports torch."""
