//! Opens sealed dead letters for operators.

use oncegate_postgres::messages::{DeadLetterLine, MessageContent, OpenDeadLetters};
use oncegate_seal::{DeadLetterPlace, SealKeys, open_dead_letter, open_dead_letter_error};

/// Opens dead letters with the keys of a sidecar or of a command.
pub(crate) struct DeadLetterKeys(pub(crate) SealKeys);

fn place(line: &DeadLetterLine) -> DeadLetterPlace<'_> {
    DeadLetterPlace { id: line.record, consumer: &line.consumer, topic: &line.topic }
}

/// Without `seal-required`, which is about records: dead letters that programs wrote in SQL are in clear.
impl OpenDeadLetters for DeadLetterKeys {
    fn open_error(&self, line: &DeadLetterLine) -> Result<Option<String>, String> {
        let keys = self.0.get().with_required(false);
        open_dead_letter_error(&place(line), &line.error, &keys).map_err(|why| why.to_string())
    }

    fn open_content(
        &self,
        line: &DeadLetterLine,
        content: &MessageContent,
    ) -> Result<Option<MessageContent>, String> {
        let keys = self.0.get().with_required(false);
        let names: Vec<&str> = content.headers.iter().map(|(name, _)| name.as_str()).collect();
        let opened = open_dead_letter(&place(line), &names, &content.payload, &keys);
        let Some(opened) = opened.map_err(|why| why.to_string())? else { return Ok(None) };
        let names = names.into_iter().map(str::to_owned);
        let headers = names.zip(opened.header_values.iter().map(|value| value.to_vec())).collect();
        Ok(Some(MessageContent::new(headers, opened.payload.into())))
    }
}
