"""The processes of a run: how they start, meet, talk, watch each other and end."""
