"""torch's tests that do not apply to pmstore's storage, and why."""

DOES_NOT_APPLY: dict[str, str] = {
    "test_storage_meta": "compares the metadata with writer.save_id and reader.load_id, "
    "attributes of torch's own writer and reader alone",
    "test_overwrite": "asks for an error with overwrite=False: StoreWriter never overwrites, it "
    "keeps the checkpoints before (keep=)",
}
