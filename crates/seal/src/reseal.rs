//! Sealing a record anew: with the key that seals now.

use oncegate_core::{Command, Outcome, Record, RecordId, Replacement, Rewrite, StoreError};

use crate::envelope::{self, Place, SealError, SealInfo, Writer};
use crate::keyring::Keyring;
use crate::store::{SealedStore, writer};

/// The result of [`SealedStore::reseal`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ResealOutcome {
    /// The record keeps no response and no steps.
    NothingKept,
    /// Every part that is sealed is sealed with the key that seals now. Parts in clear were left as they are.
    UpToDate {
        /// True if a part is in clear.
        has_clear: bool,
    },
    /// All parts that had to be are sealed with the key that seals now.
    Resealed {
        /// True if a part was in clear before.
        was_clear: bool,
        /// True if a part is in clear still.
        has_clear: bool,
    },
    /// The record changed after it was read, and was left alone. Read it again.
    Changed,
    /// The retention of the record is over.
    Gone,
    /// A part cannot be opened ([`SealError::KeyMissing`], [`SealError::Broken`], [`SealError::UnknownVersion`]), or its
    /// sealed form is too large ([`SealError::Response`], [`SealError::Step`]). Nothing was changed.
    Refused(SealError),
}

/// The way in which [`SealedStore::reseal`] treats a record.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResealOptions {
    /// Also seals what is in clear. Programs that read records by themselves, such as those that use `transact`, need the keys
    /// before, because without them they refuse a sealed response. Without effect if unsealed content is refused
    /// ([`Keyring::with_required`]): a sealed form would make content look genuine that this process would refuse.
    pub seals_clear: bool,
    /// Changes nothing, and returns what it would do.
    pub is_dry_run: bool,
}

impl SealedStore {
    /// Seals the content of a record with the key that seals now, if it is sealed with another one. `record` is as the wrapped
    /// store has it ([`SealedStore::wrapped`]). Compared with all that it has read, so that nothing which changed meanwhile is
    /// lost; a second call does the rest after a lost reply.
    ///
    /// # Errors
    /// As for [`Store::apply`](oncegate_core::Store::apply), and
    /// [`StoreErrorKind::Invalid`](oncegate_core::StoreErrorKind::Invalid) if no key seals.
    pub async fn reseal(
        &self,
        id: RecordId,
        record: &Record,
        options: ResealOptions,
    ) -> Result<ResealOutcome, StoreError> {
        let keys = self.keys().get();
        if keys.sealing().is_none() {
            return Err(StoreError::invalid(
                "no seal key of this process seals, so nothing can be sealed anew",
            ));
        }
        let anew = match anew(id, record, &keys, options.seals_clear && !keys.is_required()) {
            Ok(anew) => anew,
            Err(error) => return Ok(ResealOutcome::Refused(error)),
        };
        let Anew { rewrite, was_clear, has_clear } = anew;
        if rewrite.response.is_none() && rewrite.step_results.is_empty() {
            return Ok(ResealOutcome::NothingKept);
        }
        if rewrite.is_empty() {
            return Ok(ResealOutcome::UpToDate { has_clear });
        }
        if options.is_dry_run {
            return Ok(ResealOutcome::Resealed { was_clear, has_clear });
        }
        Ok(match self.wrapped().apply(id, Command::Rewrite(rewrite)).await? {
            Outcome::Rewritten => ResealOutcome::Resealed { was_clear, has_clear },
            Outcome::NotRewritten { state: None } => ResealOutcome::Gone,
            Outcome::NotRewritten { .. } => ResealOutcome::Changed,
            other => {
                return Err(StoreError::invalid(format!("the store answered {other:?} to a rewrite")));
            }
        })
    }
}

struct Anew {
    rewrite: Rewrite,
    was_clear: bool,
    has_clear: bool,
}

/// The rewrite that seals a record anew. Each part is sealed for the place that it was sealed for: a step keeps the token of the
/// attempt that recorded it.
fn anew(id: RecordId, record: &Record, keys: &Keyring, seals_clear: bool) -> Result<Anew, SealError> {
    let present = keys.sealing().map(crate::key::SealKey::id);
    let (mut was_clear, mut has_clear) = (false, false);
    let mut rewrite = Rewrite::of(record);
    // Unsealed parts are opened here only to be sealed.
    let opening = keys.clone().with_required(false);
    let mut is_left = |info: Option<SealInfo>| match info {
        Some(info) => Some(info.key) == present,
        None if seals_clear => {
            was_clear = true;
            false
        }
        None => {
            has_clear = true;
            true
        }
    };
    if let Some(Replacement { from, to }) = &mut rewrite.response {
        let info = if from.is_sealed() { Some(SealInfo::read(from.as_body())?) } else { None };
        if !is_left(info) {
            let opened = envelope::open_response(id, writer(record), from.clone(), &opening)?;
            *to = envelope::seal_response(&place_of_response(id, record), &opened, keys)?;
        }
    }
    for (number, (part, step)) in rewrite.step_results.iter_mut().zip(record.steps.as_slice()).enumerate() {
        let info =
            if envelope::is_sealed(step.result()) { Some(SealInfo::read(step.result())?) } else { None };
        if !is_left(info) {
            let opened = envelope::open_step(id, record.token, number, step, &opening)?;
            let token = info.map_or(record.token, |info| info.token);
            part.to = envelope::seal_step(id, token, number, &opened, keys)?.result().clone();
        }
    }
    Ok(Anew { rewrite, was_clear, has_clear })
}

/// The place of a record's response.
pub(crate) fn place_of_response(id: RecordId, record: &Record) -> Place<'static> {
    match writer(record) {
        Writer::Operator => Place::operator(id),
        _ => Place::owner(id, record.token),
    }
}
