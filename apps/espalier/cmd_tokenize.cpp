// tokenize, detokenize, render: what the tokenizer and the chat encoding of a model make of a text, ids or a
// conversation.
#include <CLI/CLI.hpp>
#include <cstdio>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "apps/espalier/command.h"
#include "base/file.h"
#include "format/json.h"
#include "text/chat.h"
#include "text/engram_map.h"
#include "text/tokenizer.h"

namespace espalier::app {
namespace {

struct TokenizeOptions {
  std::string model, text, file, chat;
  std::vector<int32_t> ids;
  bool plain = false;
  bool add_template = false;
  bool engram_map = false;
  bool skip_special = false;
  bool parse_special = false;
};

// MODEL is a folder, "pocket", or the tokenizer.json itself.
Result<Tokenizer> open_tokenizer(const std::string& model) {
  std::error_code ignored;
  if (std::filesystem::is_regular_file(model, ignored)) return Tokenizer::open(model);
  ASSIGN_OR_RETURN(const std::string folder, resolve_model(model));
  return Tokenizer::open(folder);
}

// One JSON document for each line of a file.
Result<std::vector<Json>> read_json_lines(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, read_text_file(path));
  std::vector<Json> out;
  for (size_t begin = 0, line = 1; begin < text.size(); ++line) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const std::string where = "'" + path + "' line " + std::to_string(line);
    ASSIGN_OR_RETURN(Json value, parse_json(std::string_view(text).substr(begin, end - begin), where));
    out.push_back(std::move(value));
    begin = end + 1;
  }
  return out;
}

void print_ids(const Json& ids) {
  std::string line;
  for (const Json& id : ids) line += (line.empty() ? "" : " ") + std::to_string(id.get<int32_t>());
  std::printf("%s\n", line.c_str());
}

Result<int> run_tokenize(const TokenizeOptions& options, bool json) {
  ASSIGN_OR_RETURN(const Tokenizer tokenizer, open_tokenizer(options.model));
  Json document;
  if (options.engram_map) {
    ASSIGN_OR_RETURN(const EngramMap map, build_engram_map(tokenizer));
    document["n_classes"] = map.n_classes;
    document["class_of"] = map.class_of;
    if (json) {
      print_json(dump_json(document));
    } else {
      std::printf("%d tokens, %d classes\n", tokenizer.n_tokens(), map.n_classes);
    }
    return 0;
  }
  const EncodeOptions encode{!options.plain, options.add_template};
  if (options.file.empty()) {
    ASSIGN_OR_RETURN(document["ids"], tokenizer.encode(options.text, encode));
    if (!json) print_ids(document["ids"]);
  } else {
    ASSIGN_OR_RETURN(const std::vector<Json> lines, read_json_lines(options.file));
    document["ids"] = Json::array();
    for (size_t i = 0; i < lines.size(); ++i) {
      if (!lines[i].is_string()) {
        return data_loss("'" + options.file + "' line " + std::to_string(i + 1) + ": expected a JSON string");
      }
      ASSIGN_OR_RETURN(const std::vector<int32_t> ids,
                       tokenizer.encode(lines[i].get_ref<const std::string&>(), encode));
      document["ids"].push_back(ids);
      if (!json) print_ids(document["ids"].back());
    }
  }
  if (json) print_json(dump_json(document));
  return 0;
}

Result<std::vector<int32_t>> ids_of_line(const Json& line, const std::string& where) {
  std::vector<int32_t> ids;
  if (!line.is_array()) return data_loss(where + ": expected a JSON array of ids");
  for (const Json& id : line) {
    if (!id.is_number_integer() || id < INT32_MIN || id > INT32_MAX)
      return data_loss(where + ": expected a JSON array of ids");
    ids.push_back(id.get<int32_t>());
  }
  return ids;
}

Result<int> run_detokenize(const TokenizeOptions& options, bool json) {
  ASSIGN_OR_RETURN(const Tokenizer tokenizer, open_tokenizer(options.model));
  Json document;
  if (options.file.empty()) {
    RETURN_IF_ERROR(tokenizer.check_ids(options.ids));
    document["text"] = tokenizer.decode(options.ids, options.skip_special);
    if (!json) std::printf("%s\n", document["text"].get_ref<const std::string&>().c_str());
  } else {
    ASSIGN_OR_RETURN(const std::vector<Json> lines, read_json_lines(options.file));
    document["text"] = Json::array();
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string where = "'" + options.file + "' line " + std::to_string(i + 1);
      ASSIGN_OR_RETURN(const std::vector<int32_t> ids, ids_of_line(lines[i], where));
      if (const Status status = tokenizer.check_ids(ids); !status.ok())
        return data_loss(where + ": " + status.message());
      document["text"].push_back(tokenizer.decode(ids, options.skip_special));
      if (!json) std::printf("%s\n", dump_json(document["text"].back()).c_str());
    }
  }
  if (json) print_json(dump_json(document));
  return 0;
}

Result<RenderedPrompt> render(const Tokenizer& tokenizer, const Json& body, bool parse_special,
                              const std::string& where) {
  auto chat = parse_chat_json(body);
  if (!chat.ok()) return data_loss(where + ": " + chat.error().message());
  chat->parse_special_in_content = parse_special;
  return render_chat(tokenizer, *chat);
}

Result<int> run_render(const TokenizeOptions& options, bool json) {
  ASSIGN_OR_RETURN(const Tokenizer tokenizer, open_tokenizer(options.model));
  Json document;
  if (!options.chat.empty()) {
    ASSIGN_OR_RETURN(const Json body, read_json_file(options.chat));
    ASSIGN_OR_RETURN(const RenderedPrompt prompt,
                     render(tokenizer, body, options.parse_special, "'" + options.chat + "'"));
    document = {{"prompt", prompt.text}, {"ids", prompt.ids}};
    if (!json) {
      std::printf("%s\n", prompt.text.c_str());
      print_ids(document["ids"]);
    }
  } else {
    ASSIGN_OR_RETURN(const std::vector<Json> lines, read_json_lines(options.file));
    document = {{"prompt", Json::array()}, {"ids", Json::array()}};
    for (size_t i = 0; i < lines.size(); ++i) {
      const std::string where = "'" + options.file + "' line " + std::to_string(i + 1);
      ASSIGN_OR_RETURN(const RenderedPrompt prompt, render(tokenizer, lines[i], options.parse_special, where));
      document["prompt"].push_back(prompt.text);
      document["ids"].push_back(prompt.ids);
      if (!json) std::printf("%s\n", dump_json(document["prompt"].back()).c_str());
    }
  }
  if (json) print_json(dump_json(document));
  return 0;
}

}  // namespace

void add_tokenize(CommandTable& table) {
  const auto options = std::make_shared<TokenizeOptions>();

  CLI::App* tokenize = table.add("tokenize", "Token ids of a text", [options](CommandContext& context) {
    return run_tokenize(*options, context.common.json);
  });
  tokenize->add_option("MODEL", options->model, "Model folder, 'pocket', or a tokenizer.json")->required();
  auto* source = tokenize->add_option_group("text")->require_option(1);
  source->add_option("TEXT", options->text, "The text");
  source->add_option("--file", options->file, "Read texts from a file, one JSON string a line");
  source->add_flag("--engram-map", options->engram_map, "Print the Engram class of every token instead");
  tokenize->add_flag("--plain", options->plain, "Markers such as <think> in the text are ordinary text");
  tokenize->add_flag("--template", options->add_template, "Add what the file's post-processor puts around a text");

  CLI::App* detokenize = table.add("detokenize", "Text of token ids", [options](CommandContext& context) {
    return run_detokenize(*options, context.common.json);
  });
  detokenize->add_option("MODEL", options->model, "Model folder, 'pocket', or a tokenizer.json")->required();
  auto* ids = detokenize->add_option_group("ids")->require_option(1);
  ids->add_option("IDS", options->ids, "Token ids");
  ids->add_option("--file", options->file, "Read ids from a file, one JSON array a line");
  detokenize->add_flag("--skip-special", options->skip_special, "Leave special tokens out");

  CLI::App* render = table.add("render", "Prompt text and ids of a conversation", [options](CommandContext& context) {
    return run_render(*options, context.common.json);
  });
  render->add_option("MODEL", options->model, "Model folder, 'pocket', or a tokenizer.json")->required();
  auto* chat = render->add_option_group("conversation")->require_option(1);
  chat->add_option("--chat", options->chat, "A chat-completions body or its messages array");
  chat->add_option("--file", options->file, "Read conversations from a file, one a line");
  render->add_flag("--parse-special", options->parse_special,
                   "Markers spelled inside messages become tokens, as in the reference encoder");
}

}  // namespace espalier::app
