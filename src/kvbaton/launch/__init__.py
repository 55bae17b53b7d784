"""Start a whole prefill/decode deployment on one machine, watch it, and stop it without leftovers."""
