"""Processes that keep libraries imported between rounds of one command, and the files whose change asks for a round."""
