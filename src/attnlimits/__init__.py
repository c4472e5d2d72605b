"""attnlimits: what does my attention normalizer do to my model?"""
