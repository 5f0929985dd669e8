// `espalier panel build`: a data set from texts or conversations, disjoint from other sets.
#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "format/json.h"
#include "stages/calibrate/dataset_builder.h"

namespace espalier::app {
namespace {

struct Flags {
  std::vector<std::string> texts, chats, disjoint;
  std::string tokenizer, domain, out, mode, source, licence, part;
  int64_t length = 1024, rows = 0, ngram = 13;
};

// "0-7/10" or "3/10".
Result<DocumentPart> parse_part(const std::string& text) {
  DocumentPart part;
  if (text.empty()) return part;
  const char* at = text.data();
  const char* end = at + text.size();
  const auto number = [&](int64_t& out) {
    const auto [stop, code] = std::from_chars(at, end, out);
    const bool ok = code == std::errc() && stop != at;
    at = stop;
    return ok;
  };
  bool ok = number(part.first);
  part.last = part.first;
  if (ok && at != end && *at == '-') ok = (++at, number(part.last));
  ok = ok && at != end && *at == '/' && (++at, number(part.of)) && at == end;
  if (!ok || part.first < 0 || part.first > part.last || part.last >= part.of)
    return invalid_argument("--part: expected A/M or A-B/M with A <= B < M, such as 0-7/10, found '" + text + "'");
  return part;
}

Result<Tokenizer> open_tokenizer(const std::string& model) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(model, ignored)) return Tokenizer::open(model);
  ASSIGN_OR_RETURN(const std::string folder, resolve_model(model));
  return Tokenizer::open(folder);
}

Status add_texts(const Flags& flags, const Tokenizer& tokenizer, const DocumentPart& part, const RowLabels& labels,
                 std::vector<DatasetRow>* rows) {
  for (const std::string& path : flags.texts) {
    const std::string document = std::filesystem::path(path).filename().string();
    if (!is_in_part(part, document)) continue;
    ASSIGN_OR_RETURN(const std::string text, read_text_file(path));
    ASSIGN_OR_RETURN(std::vector<DatasetRow> made, rows_of_text(tokenizer, document, text, flags.length, labels));
    std::move(made.begin(), made.end(), std::back_inserter(*rows));
  }
  return ok_status();
}

// A file with one conversation, or with one on every line when its name ends in .jsonl. Those longer than --length are
// left out.
Status add_chats(const Flags& flags, const Tokenizer& tokenizer, const DocumentPart& part, const RowLabels& labels,
                 std::vector<DatasetRow>* rows, int64_t* n_long) {
  for (const std::string& path : flags.chats) {
    const std::string file = std::filesystem::path(path).filename().string();
    ASSIGN_OR_RETURN(const std::string text, read_text_file(path));
    const bool is_lines = std::filesystem::path(path).extension() == ".jsonl";
    int64_t line = 0;
    for (size_t begin = 0; begin < text.size();) {
      const size_t end = is_lines ? std::min(text.find('\n', begin), text.size()) : text.size();
      const std::string name = is_lines ? file + "#" + std::to_string(++line) : file;
      const std::string where = "'" + path + "'" + (is_lines ? " line " + std::to_string(line) : "");
      const std::string_view body = std::string_view(text).substr(begin, end - begin);
      begin = end + 1;
      if (!is_in_part(part, name)) continue;
      auto request = parse_chat(body);
      if (!request.ok()) return data_loss(where + ": " + request.error().message());
      auto row = row_of_chat(tokenizer, name, *std::move(request), flags.mode == "think", labels);
      if (!row.ok()) return data_loss(where + ": " + row.error().message());
      if (static_cast<int64_t>(row->ids.size()) > flags.length) {
        ++*n_long;
        continue;
      }
      rows->push_back(*std::move(row));
    }
  }
  return ok_status();
}

Result<int> run(const Flags& flags, CommandContext& context) {
  if (flags.texts.empty() == flags.chats.empty())
    return invalid_argument("expected --text FILE… or --chats FILE…, one of them, found " +
                            std::string(flags.texts.empty() ? "none" : "both"));
  if (flags.texts.empty() == (flags.mode == "raw"))
    return invalid_argument("--mode: texts are raw, conversations chat or think, found '" + flags.mode + "'");
  std::vector<std::string> inputs = flags.texts;
  inputs.insert(inputs.end(), flags.chats.begin(), flags.chats.end());
  inputs.insert(inputs.end(), flags.disjoint.begin(), flags.disjoint.end());
  RETURN_IF_ERROR(check_output(flags.out, inputs));
  ASSIGN_OR_RETURN(const DocumentPart part, parse_part(flags.part));
  ASSIGN_OR_RETURN(const Tokenizer tokenizer, open_tokenizer(flags.tokenizer));

  const RowLabels labels{flags.domain, flags.source, flags.licence};
  std::vector<DatasetRow> rows;
  int64_t n_long = 0;
  RETURN_IF_ERROR(add_texts(flags, tokenizer, part, labels, &rows));
  RETURN_IF_ERROR(add_chats(flags, tokenizer, part, labels, &rows, &n_long));
  const auto n_candidates = static_cast<int64_t>(rows.size());

  Json checks = Json::array();
  for (const std::string& path : flags.disjoint) {
    ASSIGN_OR_RETURN(const Dataset other, load_dataset(path));
    NgramSet seen(flags.ngram, conversation_markers(tokenizer));
    for (const DatasetRow& row : other.rows) seen.add(row);
    const int64_t before = static_cast<int64_t>(rows.size());
    std::erase_if(rows, [&](const DatasetRow& row) { return seen.shared_with(row) > 0; });
    checks.push_back({{"content_sha256", other.content_sha256},
                      {"ngram", flags.ngram},
                      {"rows_left_out", before - static_cast<int64_t>(rows.size())},
                      {"shared", 0}});
  }
  rows = pick_rows(std::move(rows), flags.rows, context.common.seed);
  std::set<std::string> ids;
  for (const DatasetRow& row : rows) {
    if (!ids.insert(row.id).second)
      return failed_precondition("row id '" + row.id + "' occurs twice: two input files have the same name; rename one");
  }
  if (rows.empty()) {
    return failed_precondition("no row is left of " + std::to_string(n_candidates) +
                               "; give more input, a larger --length or a larger --part");
  }
  RETURN_IF_ERROR(write_dataset(flags.out, rows));
  ASSIGN_OR_RETURN(const Dataset written, load_dataset(flags.out));
  if (context.common.json) {
    std::map<std::string, int64_t> roles;
    for (const DatasetRow& row : written.rows) {
      for (uint8_t r : row.role_mask) ++roles[std::to_string(r)];
    }
    print_json(dump_json({{"rows", written.rows.size()},
                          {"tokens", written.n_tokens()},
                          {"candidates", n_candidates},
                          {"too_long", n_long},
                          {"roles", roles},
                          {"sha256", written.sha256},
                          {"content_sha256", written.content_sha256},
                          {"disjoint", checks},
                          {"out", flags.out}}));
    return 0;
  }
  std::printf("%s\n  %zu of %lld rows, %lld tokens; %lld conversations were longer than %lld\n  content sha256 %s\n",
              flags.out.c_str(), written.rows.size(), static_cast<long long>(n_candidates),
              static_cast<long long>(written.n_tokens()), static_cast<long long>(n_long),
              static_cast<long long>(flags.length), written.content_sha256.c_str());
  for (const Json& c : checks) {
    std::printf("  shares no %lld tokens in a row with set %s; %lld rows left out for it\n",
                static_cast<long long>(flags.ngram), c["content_sha256"].get<std::string>().c_str(),
                static_cast<long long>(c["rows_left_out"].get<int64_t>()));
  }
  return 0;
}

}  // namespace

void add_panel(CommandTable& table) {
  const auto flags = std::make_shared<Flags>();
  CLI::App* group = table.add_group("panel", "Makes data sets");
  CLI::App* app = table.add_to(group, "build", "A data set from texts or conversations",
                               [flags](CommandContext& context) { return run(*flags, context); });
  app->add_option("--text", flags->texts, "Text files, a document each");
  app->add_option("--chats", flags->chats, "Conversations: a JSON file each, or one a line in .jsonl");
  app->add_option("--tokenizer", flags->tokenizer, "Model folder, 'pocket', or a tokenizer.json")->required();
  app->add_option("--domain", flags->domain, "Domain of every row")->required();
  app->add_option("--mode", flags->mode, "raw for texts; chat or think for conversations")
      ->required()
      ->check(CLI::IsMember({"raw", "chat", "think"}));
  app->add_option("--length", flags->length, "Most tokens of a row")->check(CLI::Range(int64_t{2}, int64_t{1} << 20));
  app->add_option("--rows", flags->rows, "Pick at most so many rows by --seed; 0 = all")->check(CLI::NonNegativeNumber);
  app->add_option("--part", flags->part, "A/M or A-B/M: only documents whose hash mod M is in A..B");
  app->add_option("--disjoint", flags->disjoint, "Another set; rows that share --ngram tokens in a row with it are left out")
      ->allow_extra_args(false);
  app->add_option("--ngram", flags->ngram, "Length of the runs of --disjoint")->check(CLI::Range(2, 1024));
  app->add_option("--source", flags->source, "Where the text comes from");
  app->add_option("--licence", flags->licence, "Its terms");
  app->add_option("--out", flags->out, "Data set to write (JSON lines)")->required();
}

}  // namespace espalier::app
