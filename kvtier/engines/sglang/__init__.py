"""SGLang on kvtier: KvtierHiCache, the storage below HiCache's host tier."""
