"""What the service has, in the forms of the API: queries of the store that make JSON.

:run_id and its like are parts of the path or fields of the body; :limit and :offset are of the
query; :name and :tokenizer are of the base model.
"""

from collections.abc import Mapping

_TIME = "strftime('%Y-%m-%dT%H:%M:%fZ', {}, 'unixepoch')"
_CHECKPOINT = f"""json_object(
    'checkpoint_id', kind || '/' || name, 'tinker_path', path, 'size_bytes', size_bytes,
    'checkpoint_type', CASE kind WHEN 'weights' THEN 'training' WHEN 'sampler_weights' THEN
        'sampler' ELSE 'external' END,
    'time', {_TIME.format("created_s")}, 'expires_at', {_TIME.format("expires_s")},
    'user_metadata', json(user_metadata))"""
_LISTED = "FROM checkpoints WHERE NOT is_gone AND name!=''"
_NEWEST = (
    f"(SELECT json({_CHECKPOINT}) {_LISTED} AND checkpoints.run_id=runs.run_id AND kind='{{}}'"
    " ORDER BY rowid DESC LIMIT 1)"
)
_REQUESTED = "(SELECT max(accepted_s) FROM requests WHERE owner=run_id)"
_RANK = "json_extract(lora, '$.rank')"
_IS_LORA = f"json(iif({_RANK}, 'true', 'false'))"
_RUN = f"""json_object(
    'training_run_id', run_id, 'base_model', :name, 'model_owner', 'local',
    'is_lora', {_IS_LORA}, 'lora_rank', {_RANK}, 'last_request_time', {_TIME.format(_REQUESTED)},
    'last_checkpoint', {_NEWEST.format("weights")},
    'last_sampler_checkpoint', {_NEWEST.format("sampler_weights")},
    'user_metadata', json(user_metadata))"""


def _page(name: str, row: str, source: str) -> str:
    """Return the query of a list that clients read in parts."""
    cursor = f"'limit', :limit, 'offset', :offset, 'total_count', (SELECT count(*) {source})"
    rows = f"SELECT {row} AS shown {source} ORDER BY rowid DESC LIMIT :limit OFFSET :offset"
    return (
        f"SELECT json_object('{name}', json_group_array(json(shown)), 'cursor',"
        f" json_object({cursor})) FROM ({rows})"
    )


QUERIES: Mapping[str, str] = {
    "GET sessions": _page("sessions", "json_quote(session_id)", "FROM sessions"),
    "GET sessions/{session_id}": "SELECT json_object('display_name', display_name, 'user_metadata',"
    " json(user_metadata), 'training_run_ids', (SELECT json_group_array(run_id) FROM runs WHERE"
    " session_id=:session_id), 'sampler_ids', (SELECT json_group_array(sampler_id) FROM samplers"
    " WHERE session_id=:session_id)) FROM sessions WHERE session_id=:session_id",
    "GET training_runs": _page("training_runs", _RUN, "FROM runs"),
    "GET training_runs/{run_id}": f"SELECT {_RUN} FROM runs WHERE run_id=:run_id",
    "GET training_runs/{run_id}/checkpoints": "SELECT json_object('checkpoints',"
    f" (SELECT json_group_array(json(shown)) FROM (SELECT {_CHECKPOINT} AS shown {_LISTED} AND"
    " run_id=:run_id ORDER BY rowid DESC))) FROM runs WHERE run_id=:run_id",
    "GET checkpoints": _page("checkpoints", _CHECKPOINT, _LISTED),
    "GET samplers/{sampler_id}": "SELECT json_object('sampler_id', sampler_id, 'base_model', :name,"
    " 'model_path', model_path) FROM samplers WHERE sampler_id=:sampler_id",
    "POST get_info": f"SELECT json_object('type', 'get_info', 'model_id', run_id, 'is_lora',"
    f" {_IS_LORA}, 'lora_rank', {_RANK}, 'model_data', json_object('model_name', :name,"
    " 'tokenizer_id', :tokenizer)) FROM runs WHERE run_id=:model_id",
    "POST weights_info": "SELECT json_patch(lora, json_object('base_model', :name, 'is_lora',"
    f" {_IS_LORA}, 'lora_rank', {_RANK})) FROM runs WHERE run_id IN (SELECT run_id FROM checkpoints"
    " WHERE path=:tinker_path AND NOT is_gone AND name!='')",
}
"""By the request."""
