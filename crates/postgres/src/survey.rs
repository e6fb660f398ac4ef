//! The numbers of records, and their places in the order of time.

use oncegate_core::{
    CallerTag, KeyTag, RecordCount, RecordId, StateName, StateSet, StoreError, Survey, SurveyQuery, Timestamp,
};
use sqlx::postgres::PgRow;

use crate::call::{Arg, Call};
use crate::record;

const SURVEY: &str =
    "SELECT * FROM oncegate.survey($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)";

/// The call for this query.
pub(crate) fn call(query: &SurveyQuery) -> Call {
    let list = &query.list;
    let states = if list.states == StateSet::ALL {
        Arg::NoManyText
    } else {
        Arg::ManyText(list.states.iter().map(|state| state.as_str().to_owned()).collect())
    };
    let args = [
        states,
        bytes(list.caller.as_ref().map(CallerTag::as_bytes)),
        bytes(list.key.as_ref().map(KeyTag::as_bytes)),
        text(list.operation.as_deref()),
        Arg::Big(record::millis(list.min_age)),
        time(query.changed_since),
        time(query.changed_before),
        bytes(query.except_id.as_ref().map(RecordId::as_bytes)),
        text(query.except_operation.as_deref()),
        bytes(list.after.as_ref().map(RecordId::as_bytes)),
        bytes(query.last.as_ref().map(RecordId::as_bytes)),
        Arg::Flag(query.by_operation),
        Arg::Flag(query.is_oldest_first),
        time(query.beyond.map(|(at, _)| at)),
        bytes(query.beyond.as_ref().map(|(_, id)| id.as_bytes())),
        Arg::Small(i32::try_from(query.max_places).unwrap_or(i32::MAX)),
    ];
    Call::new(SURVEY, args)
}

fn bytes<const N: usize>(value: Option<&[u8; N]>) -> Arg {
    value.map_or(Arg::NoBytes, |value| Arg::Bytes(value.to_vec().into()))
}

fn text(value: Option<&str>) -> Arg {
    value.map_or(Arg::NoText, |value| Arg::Text(record::text(value, usize::MAX)))
}

fn time(value: Option<Timestamp>) -> Arg {
    value.map_or(Arg::NoBig, |at| Arg::Big(i64::try_from(at.as_millis()).unwrap_or(i64::MAX)))
}

/// The survey in the reply to a [`call`].
pub(crate) fn read(rows: &[PgRow], is_oldest_first: bool) -> Result<Survey, StoreError> {
    let mut survey = Survey::default();
    for row in rows {
        if record::optional::<Vec<u8>>(row, "id")?.is_some() {
            // One that cannot be read has a place, too, and is named when it is read.
            let at = Timestamp::from_millis(record::number(row, "changed_at").unwrap_or_default());
            survey.places.push((at, record::record_id(row)?));
            continue;
        }
        // A record whose state is not one of the contract cannot be read.
        if let Some(state) = StateName::from_name(record::column(row, "state")?) {
            let operation = record::optional(row, "operation")?;
            survey.counts.push(RecordCount { state, operation, records: record::number(row, "records")? });
        }
    }
    // The order of the rows is not a part of the contract.
    survey.places.sort_unstable();
    if !is_oldest_first {
        survey.places.reverse();
    }
    Ok(survey)
}
