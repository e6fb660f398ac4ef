//! The store that seals.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use oncegate_core::{
    Advisory, Command, Complete, Completion, Decision, FencingToken, Fingerprint, IntoStore, ListPage,
    ListQuery, Outcome, Record, RecordId, RecordStep, RecordedResponse, Resolution, Resolve, Rewrite, State,
    Step, Steps, Store, StoreError, StoreFuture, StoredResponse, Write, decide, delegate_store,
};

use crate::envelope::{self, Place, SealError, SealInfo, Writer};
use crate::keyring::Keyring;
use crate::refused::SealRefusals;
use crate::reseal::place_of_response;

/// The largest response or step that is sealed or opened while a caller may hold a lock ([`Store::try_apply`]): a few tens of
/// microseconds.
const MAX_AT_ONCE_BYTES: usize = 32 * 1024;

/// The keys of a [`SealedStore`], which can be replaced while the store is in use. Clones share the keys.
#[derive(Clone, Default)]
pub struct SealKeys(Arc<RwLock<Keyring>>);

impl SealKeys {
    /// These keys.
    #[must_use]
    pub fn new(keys: Keyring) -> Self {
        Self(Arc::new(RwLock::new(keys)))
    }

    /// Replaces the keys. Commands that run keep the old ones until they end.
    pub fn replace(&self, keys: Keyring) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = keys;
    }

    /// The present keys.
    #[must_use]
    pub fn get(&self) -> Keyring {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl From<Keyring> for SealKeys {
    fn from(keys: Keyring) -> Self {
        Self::new(keys)
    }
}

impl fmt::Debug for SealKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.get(), f)
    }
}

/// A store whose responses and steps are sealed. See the [crate's page](crate).
///
/// - A response or a step whose key is missing is [`StoreErrorKind::Sealed`](oncegate_core::StoreErrorKind::Sealed), one whose
///   seal is broken is [`StoreErrorKind::Corrupt`](oncegate_core::StoreErrorKind::Corrupt). Neither is ever an absent record,
///   and no claim executes for it.
/// - A listing shows a part that cannot be opened in its sealed form ([`StoredResponse::is_sealed`]), so that operators see the
///   rest of the record.
/// - Sealed forms are 73 bytes longer. The limits on steps count sealed forms. A response that is too large in its sealed form
///   is stored as done, without its response.
pub struct SealedStore {
    store: Arc<dyn Store>,
    keys: SealKeys,
    refusals: SealRefusals,
    /// False if a step that cannot be opened does not keep the record from being read.
    opens_steps: bool,
}

impl SealedStore {
    /// Seals the responses and steps of a store.
    #[must_use]
    pub fn new(store: impl IntoStore, keys: impl Into<SealKeys>) -> Self {
        Self {
            store: store.into_store(),
            keys: keys.into(),
            refusals: SealRefusals::default(),
            opens_steps: true,
        }
    }

    /// Reads a record also if its steps cannot be opened, or are not sealed although they must be: for a process that runs no
    /// steps, next to services that record theirs. They have their stored form then.
    #[must_use]
    pub fn without_steps(self) -> Self {
        Self { opens_steps: false, ..self }
    }

    /// The wrapped store, whose records have sealed forms.
    #[must_use]
    pub fn wrapped(&self) -> &Arc<dyn Store> {
        &self.store
    }

    /// The parts that could not be opened.
    #[must_use]
    pub fn refusals(&self) -> SealRefusals {
        self.refusals.clone()
    }

    fn refused(&self, error: SealError) -> StoreError {
        self.refusals.count(error, self.store.now());
        error.into()
    }

    /// Opens the response to a claim.
    fn replay(&self, id: RecordId, response: StoredResponse, keys: &Keyring) -> Result<Outcome, StoreError> {
        let opened = envelope::open_response(id, Writer::NotKnown, response, keys);
        opened.map(Outcome::Replay).map_err(|error| self.refused(error))
    }

    /// The keys, to replace them.
    #[must_use]
    pub fn keys(&self) -> SealKeys {
        self.keys.clone()
    }

    /// Reads a record for operators: as [`Store::lookup`], but a part that cannot be opened stays in its sealed form.
    ///
    /// # Errors
    /// As for [`Store::lookup`] of the wrapped store.
    pub fn lookup_as_stored(&self, id: RecordId) -> StoreFuture<'_, Option<StoredRecord>> {
        let (found, keys) = (self.store.lookup(id), self.keys.get());
        Box::pin(async move {
            Ok(found.await?.map(|record| {
                let seal = SealInfo::of_record(&record).next();
                let refused = open(id, record.clone(), &keys).err();
                StoredRecord { record: open_as_far_as_possible(id, record, &keys), seal, refused }
            }))
        })
    }

    /// Opens the response to a claim. A cache in front of the store may have a response that was sealed anew since, and whose
    /// key is gone: the store has the newer form then.
    async fn replay_newest(
        &self,
        id: RecordId,
        response: StoredResponse,
        fingerprint: Fingerprint,
        keys: &Keyring,
    ) -> Result<Outcome, StoreError> {
        let error = match envelope::open_response(id, Writer::NotKnown, response.clone(), keys) {
            Ok(opened) => return Ok(Outcome::Replay(opened)),
            Err(error) => error,
        };
        if !matches!(error, SealError::Broken)
            && let Some(record) =
                self.store.lookup(id).await?.filter(|record| record.fingerprint == fingerprint)
        {
            match record.response() {
                Some(newest) if *newest != response => return self.replay(id, newest.clone(), keys),
                // It was removed from the store.
                None if matches!(record.state, State::Completed(_)) => return Ok(Outcome::Unreplayable),
                _ => {}
            }
        }
        Err(self.refused(error))
    }

    /// Replaces the content of a record by content in clear, which is sealed for the places that it has.
    async fn rewrite(&self, id: RecordId, rewrite: Rewrite, keys: &Keyring) -> Result<Outcome, StoreError> {
        let Some(record) = self.store.lookup(id).await? else {
            return Ok(Outcome::NotRewritten { state: None });
        };
        let opened = open(id, record.clone(), keys).map_err(|error| self.refused(error))?;
        let Decision { outcome, write } = decide(Some(&opened), &Command::Rewrite(rewrite), self.store.now());
        let Write::Put(after) = write else { return Ok(outcome) };
        let mut sealed = Rewrite::of(&record);
        if let (Some(part), Some(response)) = (&mut sealed.response, after.response()) {
            part.to = envelope::seal_response(&place_of_response(id, &record), response, keys)?;
        }
        for (number, (part, step)) in sealed.step_results.iter_mut().zip(after.steps.as_slice()).enumerate() {
            let token = SealInfo::of_step(record.steps.as_slice().get(number).unwrap_or(step));
            let token = token.map_or(record.token, |info| info.token);
            part.to = envelope::seal_step(id, token, number, step, keys)?.result().clone();
        }
        self.store.apply(id, Command::Rewrite(sealed)).await
    }

    async fn apply_sealed(&self, id: RecordId, command: Command) -> Result<Outcome, StoreError> {
        let keys = self.keys.get();
        let command = match command {
            Command::Rewrite(rewrite) => return self.rewrite(id, rewrite, &keys).await,
            command => command,
        };
        let Some(sealed) = sealed_command(id, &command, &keys)? else {
            return Ok(Outcome::StepsFull);
        };
        let outcome = match sealed {
            Sealed::Same => self.store.apply(id, command.clone()).await?,
            Sealed::Changed(sealed) => self.store.apply(id, sealed).await?,
        };
        match outcome {
            Outcome::Replay(response) => match &command {
                Command::Claim(claim) => self.replay_newest(id, response, claim.fingerprint, &keys).await,
                _ => self.replay(id, response, &keys),
            },
            Outcome::Fenced | Outcome::StepDiffers if may_be_sent_again(&command) => {
                let is_there = self.has(id, &command, &keys).await?;
                Ok(if is_there { repeated(&command) } else { outcome })
            }
            outcome => Ok(outcome),
        }
    }

    /// Returns true if the record has the content of this command already. Stores compare sealed forms, and those differ if
    /// the keys were replaced between two sendings, or if an operator or an earlier attempt wrote the same content.
    async fn has(&self, id: RecordId, command: &Command, keys: &Keyring) -> Result<bool, StoreError> {
        let Some(record) = self.store.lookup(id).await? else { return Ok(false) };
        let Ok(record) = open(id, record, keys) else { return Ok(false) };
        Ok(match command {
            Command::Complete(Complete { token, completion: Completion::Replayable(response), .. }) => {
                let same = State::Completed(RecordedResponse::Replayable(response.clone()));
                record.token == *token && record.state == same
            }
            Command::Step(RecordStep { token, number, step }) => {
                record.token == *token
                    && matches!(record.state, State::InProgress { .. })
                    && record.steps.as_slice().get(*number) == Some(step)
            }
            _ => false,
        })
    }
}

/// A record as far as it can be opened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StoredRecord {
    /// The record. A part that cannot be opened has its sealed form.
    pub record: Record,
    /// The facts about the seal of its response or, without one, of its first sealed step.
    pub seal: Option<SealInfo>,
    /// The reason why a part cannot be opened.
    pub refused: Option<SealError>,
}

impl Store for SealedStore {
    fn apply(&self, id: RecordId, command: Command) -> StoreFuture<'_, Outcome> {
        Box::pin(self.apply_sealed(id, command))
    }

    fn try_apply(&self, id: RecordId, command: &Command) -> Option<Result<Outcome, StoreError>> {
        if content_bytes(command) > MAX_AT_ONCE_BYTES || matches!(command, Command::Rewrite(_)) {
            return None;
        }
        let keys = self.keys.get();
        let reply = match sealed_command(id, command, &keys) {
            Ok(Some(Sealed::Same)) => self.store.try_apply(id, command)?,
            Ok(Some(Sealed::Changed(sealed))) => self.store.try_apply(id, &sealed)?,
            // The other way gives the reason.
            Ok(None) | Err(_) => return None,
        };
        match reply {
            // A replay changes nothing, so it may be asked again without the lock.
            Ok(Outcome::Replay(response)) if response.as_body().len() > MAX_AT_ONCE_BYTES => None,
            Ok(Outcome::Replay(response)) => {
                match envelope::open_response(id, Writer::NotKnown, response, &keys) {
                    Ok(opened) => Some(Ok(Outcome::Replay(opened))),
                    Err(error @ SealError::Broken) => Some(Err(self.refused(error))),
                    // `apply` finds out if there is a newer form.
                    Err(_) => None,
                }
            }
            // These change nothing, either; `apply` finds out if the content is there.
            Ok(Outcome::Fenced | Outcome::StepDiffers) if may_be_sent_again(command) => None,
            reply => Some(reply),
        }
    }

    fn lookup(&self, id: RecordId) -> StoreFuture<'_, Option<Record>> {
        let (found, keys) = (self.store.lookup(id), self.keys.get());
        Box::pin(async move {
            let Some(mut record) = found.await? else { return Ok(None) };
            if self.opens_steps {
                return open(id, record, &keys).map(Some).map_err(|error| self.refused(error));
            }
            open_response(id, &mut record, &keys).map_err(|error| self.refused(error))?;
            open_steps_as_far_as_possible(id, &mut record, &keys);
            Ok(Some(record))
        })
    }

    fn list(&self, query: ListQuery) -> StoreFuture<'_, ListPage> {
        let (page, keys) = (self.store.list(query), self.keys.get());
        Box::pin(async move {
            let mut page = page.await?;
            let open = |(id, record)| (id, open_as_far_as_possible(id, record, &keys));
            page.records = page.records.into_iter().map(open).collect();
            Ok(page)
        })
    }

    /// Those of the wrapped store, and one about keys that were missing and still are.
    fn advisories(&self) -> Vec<Advisory> {
        let mut advisories = self.store.advisories();
        advisories.extend(self.refusals.advisory(&self.keys.get()));
        advisories
    }

    delegate_store!(
        self, self.store => survey purge audit check changed
            open_transactions usage clock_skew accept_clock now capabilities
    );
}

impl fmt::Debug for SealedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SealedStore").field("keys", &self.keys).finish_non_exhaustive()
    }
}

/// A command for the wrapped store.
enum Sealed {
    /// The command as it is: it has nothing to seal.
    Same,
    Changed(Command),
}

/// The command with sealed content. `None` if the sealed form of a step exceeds the limits.
fn sealed_command(id: RecordId, command: &Command, keys: &Keyring) -> Result<Option<Sealed>, StoreError> {
    if keys.sealing().is_none() {
        return Ok(Some(Sealed::Same));
    }
    let sealed = match command {
        Command::Complete(complete) => {
            let Completion::Replayable(response) = &complete.completion else {
                return Ok(Some(Sealed::Same));
            };
            let completion = match envelope::seal_response(&Place::owner(id, complete.token), response, keys)
            {
                Ok(sealed) => Completion::Replayable(sealed),
                // The operation took place, and it must not run again for the sake of its response.
                Err(SealError::Response(_)) => Completion::Tombstone,
                Err(error) => return Err(error.into()),
            };
            Command::Complete(Complete { completion, ..complete.clone() })
        }
        Command::Resolve(resolve) => {
            let Resolution::Complete(Some(response)) = &resolve.resolution else {
                return Ok(Some(Sealed::Same));
            };
            let sealed = envelope::seal_response(&Place::operator(id), response, keys)?;
            Command::Resolve(Resolve { resolution: Resolution::Complete(Some(sealed)), ..resolve.clone() })
        }
        Command::Step(RecordStep { token, number, step }) => {
            match envelope::seal_step(id, *token, *number, step, keys) {
                Ok(step) => Command::Step(RecordStep { token: *token, number: *number, step }),
                Err(SealError::Step(_)) => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
        _ => return Ok(Some(Sealed::Same)),
    };
    Ok(Some(Sealed::Changed(sealed)))
}

/// The bytes that would be sealed.
fn content_bytes(command: &Command) -> usize {
    let response = |response: &StoredResponse| response.as_encoded().len();
    match command {
        Command::Complete(Complete { completion: Completion::Replayable(content), .. }) => response(content),
        Command::Resolve(Resolve { resolution: Resolution::Complete(Some(content)), .. }) => {
            response(content)
        }
        Command::Step(command) => command.step.size(),
        _ => 0,
    }
}

/// True for a command that succeeds again if it is sent again with the same content.
const fn may_be_sent_again(command: &Command) -> bool {
    matches!(
        command,
        Command::Complete(Complete { completion: Completion::Replayable(_), .. }) | Command::Step(_)
    )
}

/// The reply to a command whose content is there already.
const fn repeated(command: &Command) -> Outcome {
    match command {
        Command::Step(_) => Outcome::StepRecorded,
        _ => Outcome::Completed,
    }
}

/// Opens all parts of a record.
fn open(id: RecordId, mut record: Record, keys: &Keyring) -> Result<Record, SealError> {
    open_response(id, &mut record, keys)?;
    if !record.steps.is_empty() {
        record.steps = opened_steps(id, record.token, &record.steps, keys).collect::<Result<_, _>>()?;
    }
    Ok(record)
}

/// Opens the parts of a record that can be opened, and leaves the others as they are.
fn open_as_far_as_possible(id: RecordId, mut record: Record, keys: &Keyring) -> Record {
    let _keeps_its_sealed_form = open_response(id, &mut record, keys);
    open_steps_as_far_as_possible(id, &mut record, keys);
    record
}

/// Opens the response of a record, if it has one.
fn open_response(id: RecordId, record: &mut Record, keys: &Keyring) -> Result<(), SealError> {
    if let State::Completed(RecordedResponse::Replayable(response)) = &record.state {
        let opened = envelope::open_response(id, writer(record), response.clone(), keys)?;
        record.state = State::Completed(RecordedResponse::Replayable(opened));
    }
    Ok(())
}

fn open_steps_as_far_as_possible(id: RecordId, record: &mut Record, keys: &Keyring) {
    if !record.steps.is_empty() {
        let opened = opened_steps(id, record.token, &record.steps, keys);
        let steps =
            opened.zip(record.steps.as_slice()).map(|(opened, step)| opened.unwrap_or_else(|_| step.clone()));
        record.steps = steps.collect();
    }
}

fn opened_steps(
    id: RecordId,
    newest: FencingToken,
    steps: &Steps,
    keys: &Keyring,
) -> impl Iterator<Item = Result<Step, SealError>> {
    steps
        .as_slice()
        .iter()
        .enumerate()
        .map(move |(number, step)| envelope::open_step(id, newest, number, step, keys))
}

pub(crate) const fn writer(record: &Record) -> Writer {
    if record.by_operator { Writer::Operator } else { Writer::Owner(record.token) }
}
